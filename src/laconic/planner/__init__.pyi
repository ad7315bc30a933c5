from .cost import Cost as Cost
from .plan import Asked as Asked
from .plan import Plan as Plan
from .plan import Planned as Planned
from .predict import Prediction as Prediction
from .subject import Subject as Subject
